"""The console in a real Chromium, before a real gateway."""
