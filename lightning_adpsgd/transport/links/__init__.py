"""Links: authenticated TCP connections between super-learners that come and go."""
