"""The HTTP API: looks up paths of the data plane, and serves every other route with FastAPI."""
