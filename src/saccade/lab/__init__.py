"""The local page of `saccade lab`: what the library plans, counts and computes, to look at.

server.py answers this machine alone. Each other module is one view's numbers; the page draws them, and makes none but
the float64 reference that it compares kernels with.
"""
