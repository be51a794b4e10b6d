"""fp8scope's vocabulary: formats, metrics, series, wire messages, commands, rules, access.

Everything the probe, the trainer, the collector and the dashboard agree on, and nothing else: no torch,
no web framework, no database.
"""
