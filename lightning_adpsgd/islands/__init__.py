"""Super-learners that are jobs of their own, and may come and go.

`island` is what a job sees of it. `rendezvous` is the store in which they find one
another, `membership` and `following` say who is there, `edges` holds the connections,
and `mean` averages over all who answer. `pool`, `batches`, `ledger` and `holding` share
the samples of an epoch among them.
"""
