"""Islands: super-learners that are separate jobs, and may come and go.

`island` is the interface for a job. `rendezvous` is the store in which islands find one
another; `member_list` and `membership` say which islands are present. `connections`
connects each with the peers that it asks, and `mean` averages over all that answer.
`epochs` shares samples among them. CONTRIBUTING.md follows the death of an island.
"""
