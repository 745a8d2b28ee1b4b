"""From a raw trace to the flat graph whose nodes become Ops."""
