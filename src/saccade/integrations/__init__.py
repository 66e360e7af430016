"""Doors from other libraries into Saccade."""
