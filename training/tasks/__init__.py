"""What is trained: model, data sets, collate, loss and metrics of one kind of job."""
