"""The arithmetic of the network, one operation per file: story, plain torch reference, fast version, the one that chooses."""
