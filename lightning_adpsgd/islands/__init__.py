"""Super-learners that are jobs of their own, and may come and go.

`island` is what a job sees of it. `rendezvous` is the store in which they find one
another, `members` and `membership` say who is there, `connections` says who asks whom,
and `mean` averages over all that answer. `epochs` shares samples among them.
"""
