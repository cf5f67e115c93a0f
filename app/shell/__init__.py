"""What the guided set-up and the dashboard share: the application, its screens' frame, keys, symbols and tables."""
