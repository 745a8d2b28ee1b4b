//! Paths of modules that a model repeats.

/// A module path up to its `level`-th index; the whole path if it has none.
pub fn unit_path(module: &str, level: usize) -> &str {
    let mut end = module.len();
    let (mut position, mut indices) = (0, 0);
    for part in module.split('.') {
        position += part.len();
        if is_index(part) {
            end = position;
            indices += 1;
        }
        if indices == level {
            break;
        }
        position += 1;
    }
    &module[..end]
}

/// The path up to its `level`-th index, if the module stands in one that is repeated.
pub fn repeated_module(module: &str, level: usize) -> Option<&str> {
    module.split('.').any(is_index).then(|| unit_path(module, level))
}

/// True for a part of a module path that counts repetitions.
pub fn is_index(part: &str) -> bool {
    !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unit_paths_end_at_an_index() {
        assert_eq!(unit_path("bert.encoder.layer.3.attention.self", 1), "bert.encoder.layer.3");
        assert_eq!(unit_path("layers.0.blocks.12.mlp.fc1", 2), "layers.0.blocks.12");
        assert_eq!(unit_path("layers.0.downsample", 2), "layers.0");
        assert_eq!(unit_path("bert.embeddings", 1), "bert.embeddings");
        assert_eq!(unit_path("", 1), "");
        assert_eq!(unit_path("7", 1), "7");
    }
}
