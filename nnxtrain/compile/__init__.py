"""What is known of chips and programs before they run."""
