"""The former name of `saccade.caches.prefixes`."""

from .caches.prefixes import PrefixCache as PrefixCache
