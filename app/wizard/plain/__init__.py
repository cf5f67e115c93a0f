"""The set-up as questions and answers, a line at a time."""
