"""Bytes over the wire, as Chromium's network layer counts them: headers and compressed bodies."""

from collections import defaultdict
from typing import Any

from playwright.async_api import Page


class Transfer:
    """The bytes that a page has received since `measure`."""

    def __init__(self) -> None:
        self._finished: dict[str, int] = {}
        self._arriving: dict[str, int] = defaultdict(int)
        self._urls: dict[str, str] = {}

    async def measure(self, page: Page) -> None:
        """Count from here on, as for a browser that has nothing of the site; needs Chromium."""
        session = await page.context.new_cdp_session(page)
        await session.send("Network.clearBrowserCache")
        session.on("Network.requestWillBeSent", self._on_request)
        session.on("Network.responseReceived", self._on_response)
        session.on("Network.dataReceived", self._on_data)
        session.on("Network.loadingFinished", self._on_end)
        await session.send("Network.enable")

    @property
    def by_url(self) -> dict[str, int]:
        """Bytes of each response, most first; a stream that goes on counts as far as it is."""
        sizes: dict[str, int] = defaultdict(int)
        for request, url in self._urls.items():
            sizes[url] += self._finished.get(request, self._arriving[request])
        return dict(sorted(sizes.items(), key=lambda item: -item[1]))

    @property
    def total(self) -> int:
        """Bytes of all responses."""
        return sum(self.by_url.values())

    def _on_request(self, event: dict[str, Any]) -> None:
        if not event["request"]["url"].startswith("data:"):
            self._urls[event["requestId"]] = event["request"]["url"]

    def _on_response(self, event: dict[str, Any]) -> None:
        self._arriving[event["requestId"]] += int(event["response"]["encodedDataLength"])

    def _on_data(self, event: dict[str, Any]) -> None:
        self._arriving[event["requestId"]] += int(event["encodedDataLength"])

    def _on_end(self, event: dict[str, Any]) -> None:
        self._finished[event["requestId"]] = int(event["encodedDataLength"])
