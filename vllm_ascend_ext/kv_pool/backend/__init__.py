"""The store engines behind one interface, and their one caller; they must never know requests, groups or vLLM."""
