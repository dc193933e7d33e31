"""The causal engine: facts in, causes out. Pure: no I/O, no clock."""
