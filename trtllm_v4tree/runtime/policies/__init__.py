"""Which tree to draft and how much of it to verify: small policies behind one interface. No policy changes any text."""
