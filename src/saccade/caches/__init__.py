"""Keys and values of past tokens: contiguous, or in pages that sequences share."""
