"""The faces: Lightning's Trainer and Fabric, the life of a job, checkpoints."""
