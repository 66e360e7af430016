"""`saccade.caches.prefixes` under its first name."""

from .caches.prefixes import PrefixCache as PrefixCache
