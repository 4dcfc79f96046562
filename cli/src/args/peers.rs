//! Arguments of commands about a node and its peers.

use clap::Args;

use super::{AdminArgs, whole};

/// `kvpool migrate`.
#[derive(Clone, Debug, Args)]
pub struct MigrateArgs {
    /// The sequence
    #[arg(long, value_name = "ID", value_parser = whole(0..=u64::MAX), allow_negative_numbers = true)]
    pub sequence_id: u64,
    /// The node that it goes to, by its name among the peers
    #[arg(long, value_name = "PEER")]
    pub target_node: String,
    /// The node that has it.
    #[command(flatten)]
    pub admin: AdminArgs,
}

/// `kvpool declare-ended`.
#[derive(Clone, Debug, Args)]
pub struct DeclareEndedArgs {
    /// The peer whose process has ended, by its name
    #[arg(long, value_name = "PEER")]
    pub peer: String,
    /// The node that has sequences in doubt.
    #[command(flatten)]
    pub admin: AdminArgs,
}

/// Parses the address of an admin interface to which requests are sent.
pub(super) fn admin_url(text: &str) -> Result<kvpool_node::settings::AdminUrl, String> {
    use kvpool_node::settings::{Address, AdminUrl};
    let url: AdminUrl = text.parse()?;
    match url.address() {
        Address::Tcp { port: 0, .. } => Err("port 0 is not a valid port".to_owned()),
        _ => Ok(url),
    }
}
