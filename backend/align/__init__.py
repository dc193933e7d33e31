"""One time line for all ranks: clocks, order, matching of collectives, waits, and the facts built from them."""
