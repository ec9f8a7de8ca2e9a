"""The other side of each comparison: what people run today, set up as fast as its own options allow."""
