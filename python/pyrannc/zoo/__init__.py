"""The zoo: models of public libraries, trained on several ranks and held against one process."""
