"""The training ranks' weights become one new version that every engine serves."""
