"""The local page of `saccade lab`: what the library plans, counts and computes, to look at.

server.py answers only this machine. Each other module computes the numbers of one view, and the page draws them. The
page itself computes only the float64 reference with which it compares kernels.
"""
