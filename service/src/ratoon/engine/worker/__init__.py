"""What a worker is asked, and what it does; it knows neither order nor database."""
