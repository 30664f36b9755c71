"""Engines, which run models, and everything that the gateway needs to run and to reach them.

`base` is the interface; `process`, `inprocess` and `remote` implement it. Nothing here imports the
gateway (`app`).
"""
