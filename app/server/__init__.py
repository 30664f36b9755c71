"""Serves HTTP: listens, accepts connections, prints the banner, drains and stops."""
