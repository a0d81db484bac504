"""Islands: super-learners that are separate jobs, and may come and go.

`island` is the interface for a job. `rendezvous` is the store in which islands find one
another, `members` and `membership` say which islands are present, `connections`
connects each with the peers that it asks, and `mean` averages over all that answer.
`epochs` shares samples among them.

The way of a lost island: a broken `transport.links.connection` raises `PeerLost` in a
thread of `gossip.peers`, which calls `Connections.on_lost`. The thread of `connections`
disconnects both lanes at its next turn, within a second. From that moment the island is
not asked any more.
"""
