"""asyncrl's own extensions, a folder each. The core does not import them: it finds the
folders (asyncrl/base/extensions.py), so that removing a folder removes the feature.
"""
