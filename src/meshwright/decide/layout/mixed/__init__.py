"""Search over layouts of any size and mix of devices: candidates from several methods, one simulator judges them, bounds say how far it is.

`search_mixed` in `search` is the entry; `costs` and `candidate` are what all methods share.
"""
