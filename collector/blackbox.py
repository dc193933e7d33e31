"""What the shipper reads of a rank. The format and its reader live on the ground floor: the backend's readers of

dead jobs use the same code (``lanterne/blackbox.py``) and may not import the collector.
"""

from lanterne.blackbox import BlackBox, Progress, RingReader, TapReader, identity_from_json, ranks_in

__all__ = ["BlackBox", "Progress", "RingReader", "TapReader", "identity_from_json", "ranks_in"]
