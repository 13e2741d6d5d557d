"""`ellm-sgl bench`: what real servers do on this machine, by one harness.

A scenario (`scenarios/`, one file each) says which servers there are, what load they get and which
figures are reported; `runner` starts, warms up, alternates and pairs; `report` makes the table, the
JSON document and the plot; `tables` puts documents of `docs/results/` into the docs.
"""
