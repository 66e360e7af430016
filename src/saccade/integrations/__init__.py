"""Interfaces of other libraries, computed by Saccade, and conversions of their masks."""
