//! Who may call: the token, and the rules that keep web pages out.

use std::net::IpAddr;

use axum::http::header::{AUTHORIZATION, CONTENT_TYPE, HOST};
use axum::http::{HeaderMap, Method};

use crate::settings::Token;

use super::problem::AdminError;

/// Checks the headers of a request, before its body is read. `is_public`: the route needs no token.
pub(super) fn check(
    token: Option<&Token>,
    method: &Method,
    headers: &HeaderMap,
    is_public: bool,
) -> Result<(), AdminError> {
    match token {
        Some(token) if !is_public => {
            let given = headers.get(AUTHORIZATION).map_or(&[][..], |value| value.as_bytes());
            if !is_bearer(given) || !token.is(given[BEARER.len()..].trim_ascii()) {
                return Err(AdminError::Unauthorized);
            }
        }
        Some(_) => {}
        None => check_host(headers)?,
    }
    if method == Method::POST && !is_json(headers) {
        return Err(AdminError::ContentType);
    }
    Ok(())
}

const BEARER: &[u8] = b"Bearer ";

fn is_bearer(given: &[u8]) -> bool {
    given.len() > BEARER.len() && given[..BEARER.len()].eq_ignore_ascii_case(BEARER)
}

/// Refuses the names of other hosts: with them, a web page could reach the loopback.
fn check_host(headers: &HeaderMap) -> Result<(), AdminError> {
    let host = headers.get(HOST).and_then(|host| host.to_str().ok()).unwrap_or_default();
    let name = match host.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or_default(),
        None => host.split(':').next().unwrap_or_default(),
    };
    if name.eq_ignore_ascii_case("localhost") || name.parse::<IpAddr>().is_ok() {
        return Ok(());
    }
    Err(AdminError::Forbidden(
        "without a token, this interface must be called by an IP address or as localhost".to_owned(),
    ))
}

fn is_json(headers: &HeaderMap) -> bool {
    let value = headers.get(CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    value.split(';').next().unwrap_or_default().trim().eq_ignore_ascii_case("application/json")
}
