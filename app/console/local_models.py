"""The models on this machine that a form offers: where the operator already has models.

That is the cache of Hugging Face, and the directories next to those of configured models. A page
never looks elsewhere.
"""

import asyncio
from collections.abc import Callable, Sequence

from app.console.memory_plans import PATIENCE_S
from app.settings import Settings
from engines.plan import LocalModel, local_models
from engines.spec import LocalSpec


class LocalModels:
    """Lists the models in a thread, one at a time."""

    def __init__(self, settings: Callable[[], Settings]) -> None:
        """`settings` returns those in force."""
        self._settings = settings
        self._task: asyncio.Task[list[LocalModel]] | None = None

    async def find(self) -> Sequence[LocalModel]:
        """Return the models; none while the disk does not answer."""
        if self._task is None:
            looking = asyncio.to_thread(local_models, self._known())
            self._task = asyncio.create_task(looking, name="list local models")
        task = self._task
        await asyncio.wait({task}, timeout=PATIENCE_S)
        if not task.done():
            return ()
        if self._task is task:  # not the next one, of another page that has waited for this
            self._task = None
        return task.result()

    def _known(self) -> set[str]:
        """Return the configured models, as the gateway finds them."""
        specs = (spec for model in self._settings().models for spec in model.engines)
        models = (spec.model_here for spec in specs if isinstance(spec, LocalSpec))
        return {model for model in models if model is not None}
