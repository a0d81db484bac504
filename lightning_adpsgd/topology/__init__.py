"""Who averages with whom: mixing matrices, named and custom topologies, schedules."""
