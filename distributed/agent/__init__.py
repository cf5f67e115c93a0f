"""What runs on a machine: one program of the standard library alone, and the requests that it carries out."""
