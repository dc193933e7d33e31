"""What the shipper reads of a rank. Format and reader are on the ground floor: readers of dead jobs need them too."""

from lanterne.blackbox import BlackBox, Progress, RingReader, TapReader, identity_from_json, ranks_in

__all__ = ["BlackBox", "Progress", "RingReader", "TapReader", "identity_from_json", "ranks_in"]
