"""The patchers: one file per kind of change, found through the entry-point group ``autofuse.patchers``."""
