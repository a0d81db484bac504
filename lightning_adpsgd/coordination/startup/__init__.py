"""What is checked before learners begin: who they are, and whether they can meet."""
