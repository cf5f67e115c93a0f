"""What programs that do not train know of a task: its data, its model, the packages it needs."""
