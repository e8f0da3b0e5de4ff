"""Other tools' files: the rules of their executors, and the program that a file is read as."""
