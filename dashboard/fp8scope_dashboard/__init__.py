"""The dashboard: live heat maps of a run, and the buttons that switch its layers.

A process of its own that talks to the collector's HTTP API only.
"""
