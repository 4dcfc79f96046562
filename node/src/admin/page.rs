//! The live page: one file, which follows the events of the node.

use std::sync::LazyLock;

use axum::http::header::{CONTENT_SECURITY_POLICY, REFERRER_POLICY, X_CONTENT_TYPE_OPTIONS, X_FRAME_OPTIONS};
use axum::http::{HeaderMap, HeaderValue};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use ring::digest::{SHA256, digest};

/// The page. It contains no data of the node, and nothing from other hosts.
pub(super) const PAGE: &str = include_str!("page.html");

/// The content security policy: only the page's own script and style, and requests to the node.
static POLICY: LazyLock<HeaderValue> = LazyLock::new(|| {
    let (script, style) = (sources("script"), sources("style"));
    let policy = format!(
        "default-src 'none'; img-src 'self' data:; connect-src 'self'; script-src{script}; style-src{style}; \
         base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    );
    // Hashes contain no characters that a header forbids.
    HeaderValue::try_from(policy).unwrap_or(HeaderValue::from_static("default-src 'none'"))
});

pub(super) fn restrict(headers: &mut HeaderMap) {
    headers.insert(CONTENT_SECURITY_POLICY, POLICY.clone());
    headers.insert(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    headers.insert(REFERRER_POLICY, HeaderValue::from_static("no-referrer"));
    headers.insert(X_FRAME_OPTIONS, HeaderValue::from_static("DENY"));
}

fn sources(element: &str) -> String {
    let (begin, end) = (format!("<{element}>"), format!("</{element}>"));
    let contents = PAGE.split(&begin).skip(1).filter_map(|rest| rest.split(&end).next());
    contents.map(|content| format!(" {}", source(content))).collect()
}

fn source(content: &str) -> String {
    format!("'sha256-{}'", STANDARD.encode(digest(&SHA256, content.as_bytes())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_source_is_the_hash_in_base64() {
        // The well-known hash of empty input.
        assert_eq!(source(""), "'sha256-47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU='");
        for element in ["script", "style"] {
            assert_eq!(PAGE.matches(&format!("<{element}")).count(), 1, "{element}");
            assert_eq!(sources(element).matches("'sha256-").count(), 1, "{element}");
        }
    }
}
