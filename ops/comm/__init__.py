"""Collectives between ranks: one protocol (`base.py`), one set of algorithms, three transports."""
