"""What looks at runs, afterwards or at the log so far: it reads files and knows no process of verl's."""
