"""What the shipper reads of a rank. Format and reader are on the ground floor: readers of dead jobs need them too."""

from lanterne.blackbox import BlackBox, identity_from_json, ranks_in
from lanterne.blackbox_files import Progress, RingReader, TapReader

__all__ = ["BlackBox", "Progress", "RingReader", "TapReader", "identity_from_json", "ranks_in"]
