"""What runs one step, behind one interface that the loop knows."""
