"""Random Lightning programs, which must train as they do under `ddp`."""
