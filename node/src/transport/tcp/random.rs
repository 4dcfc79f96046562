use std::io;

use super::error::LinkError;

pub(super) fn random<const N: usize>() -> Result<[u8; N], LinkError> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).map_err(|error| LinkError::Io {
        what: "random numbers".into(),
        kind: io::ErrorKind::Other,
        reason: error.to_string(),
    })?;
    Ok(bytes)
}
