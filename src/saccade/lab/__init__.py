"""The local page of `saccade lab`, which shows what the library plans, counts and computes.

server.py answers only this machine. The modules of views compute their numbers, and the page draws them. The page
itself computes only the float64 reference with which it compares kernels.
"""
